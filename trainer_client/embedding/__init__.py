"""Row-wise sharded embeddings whose keys are routed in any way.

`routing` says which rank owns a key and puts keys into the order of their owners; `tables` looks rows up, `hot.py` and
`hot_choice.py` those that every rank has; `checkpoint` keeps rows in two formats (`dcp.py`, `dynamicemb.py`).
"""
