"""Row-wise sharded embeddings whose keys are routed in any way.

- `routing`: `ownership.py` says which rank owns a key, `bucketize.py` puts keys into the order of their owners by the
  kernels of `cpu.py` and `cuda.py`, `skew.py` reports how evenly they spread.
- `tables`: `config.py` is what a user declares, and the keys of a batch; `collection.py` a lookup, from the request to
  the rows; `exchange.py` its collectives; `tables.py` the rows of one rank; `part.py` their state dicts and what keeps
  PyTorch's wrappers off them; `clipping.py` one norm over all; `hot.py` and `hot_choice.py` hot rows.
- `checkpoint`: `record.py` is what is recorded and checked of a table; `dcp.py` and `dynamicemb.py` the two formats;
  `live.py` saves and loads a collection, `optimizers.py` the state of its optimizers; `convert.py` re-routes on disk;
  `files.py` lets a directory appear when it is complete.
- `dynamicemb`: DynamicEmb's own loading of its dumps, mended.
"""
