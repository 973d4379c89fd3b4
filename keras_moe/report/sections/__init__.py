"""The sections of the routing report."""

from keras_moe.report.section import Section
from keras_moe.report.sections.capacity import DroppedPatches, Priorities
from keras_moe.report.sections.compute import Compute
from keras_moe.report.sections.explorer import Explorer
from keras_moe.report.sections.layers import Confidence, Overview, RoutingEntropies
from keras_moe.report.sections.loads import Loads, Pruning
from keras_moe.report.sections.mumoe import MuMoEExperts
from keras_moe.report.sections.top_tokens import TopTokens
from keras_moe.report.sections.transitions import ExpertTransitions

# In reading order.
SECTIONS: list[type[Section]] = [
    Overview,
    Loads,
    RoutingEntropies,
    Confidence,
    Priorities,
    DroppedPatches,
    ExpertTransitions,
    TopTokens,
    Explorer,
    Compute,
    MuMoEExperts,
    Pruning,
]
