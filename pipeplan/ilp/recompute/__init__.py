"""Planning with recomputation: which segments of layers each stage recomputes, and where to cut.

`contracted_chain` turns a recomputed segment into one layer, so that every other part of the
solver plans the contracted chain without knowing; `options` lists what a stage may choose from;
`dynamic_program` cuts the chain and chooses at once; `search` puts them together. Compare
activation checkpointing: Chen et al. (2016), Griewank and Walther (2000).
"""
