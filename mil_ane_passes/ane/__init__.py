"""Prediction of where each op of a program runs, at what cost, and in which partition.

No Mac is needed, and nothing is run. Every rule is matched against every op to find the ops that are unsupported on the
ANE of the target. The time of each op on the ANE and on the CPU is estimated as Core ML's segmenter does, and the
cheapest partition is found as it does: entering an ANE partition, each transition and each output on the ANE cost 0.125
ms.

Everything is *predicted*. The cost laws, the limits and the tie rule were fitted to half of the published results of
Core ML on one M4 (macOS 27.0.1). Agreement with that half does not show the accuracy on other data. The other half was
never read. Costs are estimates of Core ML, not latencies; those of op types without a published estimate are marked as
guesses. One network is excluded because its
published row lacks the devices of half of its ops.

Other chips differ, and sources contradict one another (conv kernels of 13 or 15, tiles, broadcasts, dilated
convolutions, old pools): each rule's page states who measured what on which chip. The target is a chip from a12 to m6,
`all` (the default), or a device such as "iPhone 15 Pro". Support that was not measured on a chip is `unknown`, never
`yes`: its prediction uses the nearest measured generation, the reason states this, and ANE299 reports it.
`op_support.py` has a row for each op type. Times are the M4's for every target.

`mil-ane-passes mac-script` writes a folder with packages, feeds, expected outputs and one script, for users with a
Mac: the script compares CPU_ONLY with ALL, times both and dumps Core ML's compute plan. `lint --measured` and
`calibrate-plan` compare the prediction with its results. The script was tested with stubs of Apple's classes; its
authors never ran it on a Mac.
"""

from __future__ import annotations

from .prediction import predict_plan

__all__ = ["predict_plan"]
