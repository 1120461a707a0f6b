"""Where a run reports: terminal, notebook, metrics file, TensorBoard, plots. Nothing here decides anything about training."""
