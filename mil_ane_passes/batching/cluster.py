"""Connection to an existing Dask cluster as an executor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from ..utils.errors import InputError

__all__ = ["connect_to_dask"]

_CONNECT_TIMEOUT = 8
"Seconds until a scheduler counts as unreachable."


@contextlib.contextmanager
def connect_to_dask(address: str, say: Callable[[str], object] = lambda text: None) -> Iterator[Executor]:
    """Connect to the workers of the scheduler at `address`, e.g. tcp://10.0.0.1:8786.

    They need the same paths and packages.

    If the cluster has no workers yet, work waits for them, as it may start them on demand; `say` gets a message then.
    Raises InputError when `distributed` is not installed, or the scheduler does not answer within 8 seconds.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError(f"running on a Dask cluster needs distributed, which cannot be imported ({error}): "
                         "pip install 'mil-ane-passes[dask]'") from error
    logging.getLogger("distributed").setLevel(logging.ERROR)
    try:
        client: Any = Client(address, timeout=_CONNECT_TIMEOUT, set_as_default=False)
    except Exception as error:  # another kind of server may answer, which can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"no Dask scheduler answers at {address} ({reason}); expected the address that "
                         "`dask scheduler` prints, e.g. tcp://10.0.0.1:8786") from error
    with client:
        if not client.scheduler_info()["workers"]:
            say(f"the cluster at {address} has no workers yet; waiting for some")
        yield client.get_executor(pure=False)
