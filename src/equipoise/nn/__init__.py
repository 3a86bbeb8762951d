"""1-Lipschitz layers that are 1-Lipschitz."""
