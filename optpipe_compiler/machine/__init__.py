"""The machine that runs a pipeline in time and memory, compiled by numba; the only importer of it.

`state` holds the arrays, `memory` what ops and messages hold and whether a grant is safe, `dispatch` the event loop,
`policy` the few numbers that steer it and a local search over them, `orders` runs of given orders and times;
`compiled`, `inlined` and `views` say how numba compiles all of it.
"""
