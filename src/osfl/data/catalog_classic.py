"""Sheets of the usual benchmark files: Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN."""

from __future__ import annotations

from osfl.data.catalog import Sheet

SHEETS: tuple[Sheet, ...] = ()
