"""From recorded calls to what the learner is given: calls → tree → batch. Pure: no torch, no I/O.

`tree` puts an attempt's calls into one trie of token segments; `kinds` says which calls are trained and why not; `batch`
turns finished rollouts into weighted rows with a ledger that counts every sampled token; `packing` cuts rows into
micro-batches that compute a shared prefix once; `report` says what became of a whole run.
"""
