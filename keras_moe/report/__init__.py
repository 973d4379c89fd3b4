"""The routing report: one page on what the experts of a model do with data."""

from keras_moe.report.model import Block, ReportedModel
from keras_moe.report.section import (
    Batch,
    Figure,
    Finding,
    Html,
    LayerSection,
    Options,
    Section,
    SectionContent,
    Table,
)
from keras_moe.report.writing import Report, write_report

__all__ = [
    "Batch", "Block", "Figure", "Finding", "Html", "LayerSection", "Options", "Report",
    "ReportedModel", "Section", "SectionContent", "Table", "write_report",
]  # fmt: skip
__dir__ = __all__.copy
