"""Row-wise sharded embeddings whose keys are routed by any mode: routing, tables and checkpoints."""
