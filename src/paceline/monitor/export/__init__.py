"""Files and endpoints for other programs: metrics.jsonl, summary.json, TensorBoard, Prometheus; imports records."""
