"""Every drawing of a report: pure functions from plain values to an SVG string. Import drawings from here."""

from osfl.reports.bars import bars
from osfl.reports.clouds import cloud
from osfl.reports.curves import histogram, lines
from osfl.reports.grids import confusion, differences, heatmap
from osfl.reports.ranked import ranked
from osfl.reports.scatter import Point, scatter

__all__ = ["Point", "bars", "cloud", "confusion", "differences", "heatmap", "histogram", "lines", "ranked", "scatter"]
