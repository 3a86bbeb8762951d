"""A scikit-learn classifier whose answers come with a proved radius: fit, predict, predict_radius.

Run: python examples/sklearn_classifier.py   (needs scikit-learn)
"""

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score, train_test_split

import equipoise as eq


class CertifiedClassifier(ClassifierMixin, BaseEstimator):
    """A 1-Lipschitz network of dense layers on feature vectors.

    Args:
        width: of the hidden layer.
        steps: of Adam, on the whole training set.
        temperature: larger values ask for more margin.
    """

    def __init__(self, width=64, steps=100, temperature=0.25):
        self.width, self.steps, self.temperature = width, steps, temperature

    def fit(self, X, y):
        self.classes_, labels = np.unique(y, return_inverse=True)
        torch.manual_seed(0)
        self.network_ = torch.nn.Sequential(
            eq.nn.BCOPLinear(X.shape[1], self.width),
            eq.nn.MaxMin(),
            eq.nn.BCOPLinear(self.width, len(self.classes_)),
        )
        x, target = torch.tensor(X, dtype=torch.float32), torch.tensor(labels)
        optimizer = torch.optim.Adam(self.network_.parameters(), lr=1e-2)
        for _ in range(self.steps):
            loss = torch.nn.functional.cross_entropy(self.network_(x) / self.temperature, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.lipschitz_ = eq.lipschitz_bound(self.network_.eval(), x[:1]).upper
        return self

    def decision_function(self, X):
        with torch.no_grad():
            return self.network_(torch.tensor(X, dtype=torch.float32)).numpy()

    def predict(self, X):
        return self.classes_[self.decision_function(X).argmax(1)]

    def predict_radius(self, X):
        """The ℓ2 distance within which the answer cannot change, up to the rounding of the float32 logits."""
        z = torch.tensor(self.decision_function(X))
        return eq.smoothing.margin_radius(z, z.argmax(1), self.lipschitz_).numpy()


if __name__ == "__main__":
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X / 16, y, random_state=0)
    model = CertifiedClassifier().fit(X_train, y_train)
    right = model.predict(X_test) == y_test
    certified = right & (model.predict_radius(X_test) >= 0.25)
    print(f"right {right.mean():.1%}, certified at 0.25: {certified.mean():.1%}")
    print("cross-validated:", cross_val_score(CertifiedClassifier(steps=20), X / 16, y, cv=2))
