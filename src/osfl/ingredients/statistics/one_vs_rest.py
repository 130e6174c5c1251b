"""Multi-label images: for each class a Gaussian classifier of it against the rest, from sums alone.

Sums are as in `gaussians`, but an image is in those of each of its classes, and in one row more, the last, of all images:
A_c, n_c, A = sum of x, N, G = sum of x x^T. With p_c = n_c / N and d_c the mean with the class minus the mean without it, the
covariance within both is S_c = S - p_c (1 - p_c) d_c d_c^T + lambda I where S = G / N - A A^T / N^2, and the log-odds are
w_c^T x + b_c, w_c = S_c^-1 d_c, b_c = -w_c^T (mean with + mean without) / 2 + ln(p_c / (1 - p_c)). By Sherman and Morrison
w_c is v_c / (1 - p_c (1 - p_c) d_c^T v_c) with v_c = (S + lambda I)^-1 d_c: one matrix is solved for all classes, and up to
its length w_c is the ridge regression of the label.
"""

from __future__ import annotations

import torch

from osfl.core.types import Task
from osfl.ingredients.statistics.gaussians import NEVER, SMALL, Statistics, solved
from osfl.ingredients.statistics.shrinkage import generalized_cross_validation
from osfl.runtime.meter import spend


def rows_of(task: Task) -> int:
    """Rows of the sums: the classes, and multi-label all images."""
    return len(task.classes) + task.several


def targets(labels: torch.Tensor) -> torch.Tensor:
    """What each row adds up: labels as they are, or multi-label (n, classes + 1), the last column for all images."""
    return labels if labels.ndim == 1 else torch.cat([labels, torch.ones_like(labels[:, :1])], 1)


def images_in(counts: torch.Tensor, task: Task) -> torch.Tensor:
    """How many images stand behind the counts of all rows."""
    return counts[-1] if task.several else counts.sum()


def hidden_few(labels: torch.Tensor, least: int) -> torch.Tensor:
    """Labels (n, classes) in which no class is of fewer than `least` images, nor of all but so few, whose sum would show them:
    it counts as absent, or as present in all."""
    counts, n = labels.sum(0), len(labels)
    shown = torch.where(counts < least, torch.zeros_like(labels), labels)
    return torch.where((n - counts < least) & (counts >= least), torch.ones_like(labels), shown)


def log_odds(total: Statistics, shrinkage: float | None = None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """W (classes, d), b (classes,) and lambda, in units of features over their deviations; without one, GCV's."""
    images, mean = float(total.counts[-1]), total.sums[-1] / total.counts[-1]
    share = (total.counts[:-1] / images).clamp(0, 1)
    covariance = total.gram / images - torch.outer(mean, mean)
    scale = covariance.diagonal().clamp_min(0).sqrt().clamp_min(SMALL)
    covariance = covariance / scale / scale[:, None]
    covariance = (covariance + covariance.T) / 2
    cross = (total.sums[:-1] / images - share[:, None] * mean) / scale  # p (1 - p) d
    if shrinkage is None:
        shrinkage = generalized_cross_validation(covariance, cross, share, images).best
    spread = (share * (1 - share))[:, None]
    known = spread > 0
    apart = torch.where(known, cross / spread.clamp_min(1e-12), torch.zeros_like(cross))  # d
    covariance.diagonal().add_(max(shrinkage, 1e-9))
    spend(len(covariance) ** 3 / 3.0)
    toward = solved(covariance, apart.T).T  # v
    along = toward / (1 - spread * (apart * toward).sum(1, keepdim=True)).clamp_min(1e-6)
    middle = (1 - 2 * share)[:, None] * apart / 2  # (mean with + mean without) / 2 - mean
    bias = -(along * middle).sum(1) + (share.clamp_min(1e-12) / (1 - share).clamp_min(1e-12)).log()
    weight = along / scale
    bias = bias - weight @ mean
    nobody, everybody = (torch.full_like(bias, sign * NEVER) for sign in (1, -1))
    bias = torch.where(share <= 0, nobody, torch.where(share >= 1, everybody, bias))
    return weight, bias, shrinkage
