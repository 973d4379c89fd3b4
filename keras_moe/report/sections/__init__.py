"""The sections of the routing report."""

from keras_moe.report.section import Section
from keras_moe.report.sections._capacity import DroppedPatches, Priorities
from keras_moe.report.sections._compute import Compute
from keras_moe.report.sections._explorer import Explorer
from keras_moe.report.sections._layers import Confidence, Overview, RoutingEntropies
from keras_moe.report.sections._loads import Loads
from keras_moe.report.sections._mumoe import MuMoEExperts
from keras_moe.report.sections._top_tokens import TopTokens
from keras_moe.report.sections._transitions import ExpertTransitions

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
]
