"""Finished runs in a tracker of experiments: TensorBoard, MLflow or Weights & Biases, on this machine."""
