"""The machine that runs a pipeline in time and memory, compiled by LLVM; the only importer of llvmlite.

`state` holds the arrays, `memory` what ops and messages hold and whether a grant is safe, `events` what happens,
`dispatch` and `orders` decide what starts, `policy` has the few numbers that steer the list scheduler and a local
search over them. `compiled` keeps the code of them all, `translate` says what they may hold.
"""
