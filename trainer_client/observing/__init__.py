"""What watches a training job: times of its steps, metrics of its ranks."""
