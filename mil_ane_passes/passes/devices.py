"""Chips of devices, by device name or model identifier.

Sources: Apple's technical specifications (https://support.apple.com/specs) for names; for identifiers of Macs Apple's
pages "Identify your MacBook Pro model" and their like, for others public lists, whose first number goes with the chip.
Devices without a Neural Engine that Core ML uses: hollance/neural-engine docs/supported-devices.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..utils.errors import InputError

__all__ = ["EXAMPLE_DEVICES", "find_chip", "list_device_names"]

EXAMPLE_DEVICES = "'iPhone 15 Pro', 'MacBook Air (M2)' or 'Mac16,12'"

_DEVICES_BY_CHIP = {
    "a11": "iPhone 8; iPhone 8 Plus; iPhone X",
    "a12": "iPhone XS; iPhone XS Max; iPhone XR; iPad (8th gen); iPad Air (3rd gen); iPad mini (5th gen); "
           "Apple TV 4K (2nd gen); iPad Pro 11-inch (1st gen); iPad Pro 11-inch (2nd gen); "
           "iPad Pro 12.9-inch (3rd gen); iPad Pro 12.9-inch (4th gen)",
    "a13": "iPhone 11; iPhone 11 Pro; iPhone 11 Pro Max; iPhone SE (2nd gen); iPad (9th gen)",
    "a14": "iPhone 12; iPhone 12 mini; iPhone 12 Pro; iPhone 12 Pro Max; iPad Air (4th gen); iPad (10th gen)",
    "m1": "iPad Pro 11-inch (3rd gen); iPad Pro 12.9-inch (5th gen); iPad Air (5th gen); iMac (2021); "
                    "Mac Studio (2022); MacBook Pro (2021)",
    "a15": "iPhone 13; iPhone 13 mini; iPhone 13 Pro; iPhone 13 Pro Max; iPhone 14; iPhone 14 Plus; "
           "iPhone SE (3rd gen); iPad mini (6th gen); Apple TV 4K (3rd gen)",
    "m2": "iPad Pro 11-inch (4th gen); iPad Pro 12.9-inch (6th gen); MacBook Air (2022); Mac Pro (2023); "
                    "Mac mini (2023); Apple Vision Pro; Vision Pro; Mac Studio (2023)",
    "a16": "iPhone 14 Pro; iPhone 14 Pro Max; iPhone 15; iPhone 15 Plus; iPad (11th gen)",
    "a17": "iPhone 15 Pro; iPhone 15 Pro Max; iPad mini (7th gen)",
    "m3": "iMac (2023); MacBook Air (2024)",
    "a18": "iPhone 16; iPhone 16 Plus; iPhone 16 Pro; iPhone 16 Pro Max; iPhone 16e",
    "m4": "iMac (2024); Mac mini (2024); MacBook Pro (2024); MacBook Air (2025)",
    "a19": "iPhone 17; iPhone 17 Pro; iPhone 17 Pro Max; iPhone Air",
    "a10": "iPhone 7; iPhone 7 Plus; iPad (6th gen); iPad (7th gen); iPod touch (7th gen); iPad Pro 10.5-inch; "
           "iPad Pro 12.9-inch (2nd gen); Apple TV 4K (1st gen)",
}
_AMBIGUOUS_NAMES = (
    "iPad",
    "iPad Air",
    "iPad mini",
    "iPad Pro",
    "iPad Pro 11-inch",
    "iPad Pro 12.9-inch",
    "iPad Pro 13-inch",
    "iPhone SE",
    "MacBook",
    "MacBook Air",
    "MacBook Pro",
    "Mac mini",
    "Mac Studio",
    "Mac Pro",
    "iMac",
    "Apple TV",
    "Apple TV 4K",
)
_IDENTIFIER_TABLE = """
iPhone9 a10; iPhone10 a11; iPhone11 a12; iPhone12 a13; iPhone13 a14; iPhone14 a15; iPhone15 a16; iPhone16 a17;
iPhone17 a18; iPhone18 a19; iPad7 a10; iPad8 a12; iPad11 a12; iPad12 a13; iPad13 a14; iPad14 a15; iPad15 a16;
iPad16,1 a17; iPad16,2 a17; iPad16 m4; iPad17 m5; MacBookAir10 m1; MacBookPro17 m1; MacBookPro18 m1; Macmini9 m1;
iMac21 m1; Mac13 m1; Mac14 m2; Mac15 m3; Mac16 m4; Mac17 m5; AppleTV6 a10; AppleTV11 a12; AppleTV14 a15;
RealityDevice14 m2; RealityDevice17 m5
"""
_FIRST_APPLE_SILICON = {
    "macbook": 10,
    "macbookair": 10,
    "macbookpro": 17,
    "macmini": 9,
    "imac": 21,
    "imacpro": 99,
    "macpro": 99,
}
"First number of a Mac's model identifier with Apple silicon; lower numbers are Macs with an Intel processor."
_WATCH = re.compile(r"(apple ?)?watch\b.*|s[1-9]\d?")
_CHIP = re.compile(r"([am]\d+)(?: ?(?:pro|max|ultra)|x|z)?")


def _normalize_name(name: str) -> str:
    """Normalize a name for comparison: lower case, "gen" for "generation", no brackets, marks or blanks."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().replace("generation", "gen")).rstrip(".")


_CHIP_BY_DEVICE = {
    _normalize_name(name): chip for chip, names in _DEVICES_BY_CHIP.items() for name in names.split("; ")
}
_CHIP_BY_IDENTIFIER = dict(entry.lower().split() for entry in _IDENTIFIER_TABLE.split(";"))


def list_device_names() -> list[str]:
    """List the known device names with an ANE that Core ML uses."""
    return [
        name for chip, names in _DEVICES_BY_CHIP.items() if chip not in ("a10", "a11") for name in names.split("; ")
    ]


def find_chip(name: str, chips: Iterable[str]) -> str | None:
    """Return the chip that `name` (a chip, with or without Pro, Max or Ultra, or a device) means; None if unknown.

    Raises InputError for a device without an ANE that Core ML uses, and for a name that several devices share.
    """
    if re.search(r"[;#=]", name):  # a comment behind a value of setup.cfg, not a name
        return None
    words = " ".join(re.sub(r"[()\u00b7_/-]|,(?!\d)", " ", name.lower()).split())
    entire = _CHIP.fullmatch(words) or _CHIP.fullmatch(words.replace(" ", ""))
    if entire:
        if entire[1] not in chips:
            _reject_without_ane(name, entire[1])
        return entire[1] if entire[1] in chips else None
    device = _CHIP_BY_DEVICE.get(_normalize_name(name)) or _find_chip_by_identifier(name)
    if device is None:
        device = next((found[1] for found in map(_CHIP.fullmatch, words.split()) if found and found[1] in chips), None)
    return _check_chip(name, words, device)


def _check_chip(name: str, words: str, chip: str | None) -> str | None:
    if chip in ("a10", "a11"):
        _reject_without_ane(name, chip)
    if _WATCH.fullmatch(words):
        raise InputError(f"target '{name}' is a watch, for whose ANE no measurements exist; expected a phone, a "
                         f"tablet, a Mac or a chip such as a14", option="target")
    if "intel" in words.split():
        _reject_without_ane(name, "Intel processor")
    if chip is None and _normalize_name(name) in map(_normalize_name, _AMBIGUOUS_NAMES):
        raise InputError(f"target '{name}' is ambiguous: devices of this name have different chips; add the chip, as "
                         f"in "
                         f"'{name.strip()} (M2)', or the generation, as in 'iPad (10th generation)'", option="target")
    return chip


def _reject_without_ane(name: str, chip: str) -> None:
    """Raise InputError for a chip known to have no ANE that Core ML uses; do nothing for an unknown chip."""
    if re.fullmatch(r"a(10|[4-9])|Intel processor", chip):
        raise InputError(f"target '{name}' has no Neural Engine ({chip if 'Intel' in chip else chip.upper()}): "
                         "models run on its CPU and GPU only; expected an A12 or later, an M1 or later, or all",
                         option="target")
    if chip == "a11":
        raise InputError(f"target '{name}' has an A11; Core ML does not use its Neural Engine "
                         "(hollance/neural-engine docs/supported-devices.md); expected an A12 or later, an M1 or "
                         "later, or all", option="target")


def _find_chip_by_identifier(name: str) -> str | None:
    """Return the chip of a model identifier, such as Mac16,12."""
    found = re.fullmatch(r"([a-z]+)(\d+),\d+", name.strip().lower())
    if not found:
        return None
    if int(found[2]) < _FIRST_APPLE_SILICON.get(found[1], 0):
        _reject_without_ane(name, "Intel processor")
    return _CHIP_BY_IDENTIFIER.get(found[0]) or _CHIP_BY_IDENTIFIER.get(f"{found[1]}{found[2]}")
