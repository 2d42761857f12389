"""What watches a training job: measurement of its steps, metrics of its ranks, costs fitted to measured times."""
