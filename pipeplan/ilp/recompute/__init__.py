"""Planning with recomputation: which runs of layers each stage computes again, and where to cut.

`merge` turns a run into one layer, so that every other part of the solver plans the merged chain
without knowing; `options` lists what a stage may choose from; `partition` cuts the chain and
chooses at once; `search` puts them together.
"""
