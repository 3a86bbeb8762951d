"""A certification run in MLflow: parameters, certified accuracy, the run directory and a bundle that others can check.

With Weights & Biases the same three calls are `wandb.init(config=…)`, `wandb.log(…)` and `wandb.save(…)`.

Run: python examples/tracked_run.py   (needs mlflow)
"""

import mlflow

import equipoise as eq

if __name__ == "__main__":
    model = eq.models.load("digits").model
    x, y = eq.data.load_dataset("digits", "test").batch(range(20))
    settings = {"sigma": 0.12, "n": 500, "alpha": 1e-3, "seed": 0}

    with mlflow.start_run(run_name="digits"):
        mlflow.log_params(settings)
        run = eq.certify(model, (x, y), run_dir="runs/digits", **settings)
        summary = run.summary([0.0, 0.1, 0.25])
        for epsilon, share in summary.accuracy.items():
            mlflow.log_metric(f"certified_at_{epsilon:g}", share)
        mlflow.log_metric("average_radius", summary.results.average_radius)

        eq.certificates.write(model, x, y, "bundle", epsilons=[0.1])
        mlflow.log_artifacts("runs/digits", "run")
        mlflow.log_artifacts("bundle", "bundle")
        stored = mlflow.get_run(mlflow.active_run().info.run_id).data.metrics
    print("logged:", {name: round(value, 3) for name, value in sorted(stored.items())})
