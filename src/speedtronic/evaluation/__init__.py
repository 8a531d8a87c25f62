"""What a model is worth on data that it was not trained on: losses, metrics, texts, and standard tasks."""

from __future__ import annotations

from speedtronic.evaluation.evaluation import Evaluation
from speedtronic.evaluation.held_out import HeldOutLoss
from speedtronic.evaluation.metrics import Metric, build_metrics, predictions_and_targets
from speedtronic.evaluation.tokens import TokenMeasures

__all__ = ["Evaluation", "HeldOutLoss", "Metric", "TokenMeasures", "build_metrics", "predictions_and_targets"]
