"""Row-wise sharded embeddings whose keys are routed in any way: routing, tables and checkpoints."""
