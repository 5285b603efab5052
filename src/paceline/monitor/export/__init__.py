"""For other programs: metrics.jsonl, summary.json, TensorBoard, Prometheus, experiment trackers; imports records."""
