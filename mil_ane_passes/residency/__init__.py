"""Where each op of a program is predicted to run, at what cost, and in which segments.

No Mac is needed, and nothing is run. Each rule is asked about each op: does the ANE of the target take it? The time
of each op on the ANE and on the CPU is estimated as Core ML's segmenter does, and the cheapest partition is found as
it does: 0.125 ms to enter an ANE segment, for each transition and for an output on the ANE.

All of it is *predicted*. The laws of cost, the limits and the rule for ties were fitted to half of what Core ML
itself answered on one M4 (macOS 27.0.1), as published; that they reproduce that half says nothing of how they do
elsewhere. The other half was never read. Estimates are Core ML's beliefs, not run times; those of kinds without a
published one are marked as guesses. One network is left out of the ops: its published row lacks devices.

Other chips differ, and sources contradict one another (conv kernels of 13 or 15, tiles, broadcasts, dilated
convolutions, old pools): each rule's page says who measured what on which chip. The target is a chip from a12 to m6,
`all` (the default), or a device such as "iPhone 15 Pro". What nobody measured on a chip is `unknown`, never yes: its
prediction goes by the nearest measured generation, and says so. Times are the M4's whatever the target.

`mil-ane-passes mac-script` writes a folder with packages, feeds, expected outputs and one script, for somebody who
has a Mac: it compares CPU_ONLY with ALL, times both and dumps Core ML's compute plan. `lint --measured` and
`calibrate-plan` set the prediction beside what comes back. The script was tested against stand-ins for Apple's
classes and was never run on a Mac by us.
"""

from __future__ import annotations

from .prediction import predict_plan

__all__ = ["predict_plan"]
