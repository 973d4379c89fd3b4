"""The sections of the routing report, one a file."""

from keras_moe.analysis.report.section import Section
from keras_moe.analysis.report.sections.compute import Compute
from keras_moe.analysis.report.sections.confidence import Confidence
from keras_moe.analysis.report.sections.dropped_patches import DroppedPatches
from keras_moe.analysis.report.sections.entropies import RoutingEntropies
from keras_moe.analysis.report.sections.explorer import Explorer
from keras_moe.analysis.report.sections.favourites import Favourites
from keras_moe.analysis.report.sections.loads import Loads
from keras_moe.analysis.report.sections.mumoe import MuMoEExperts
from keras_moe.analysis.report.sections.overview import Overview
from keras_moe.analysis.report.sections.priorities import Priorities
from keras_moe.analysis.report.sections.pruning import Pruning
from keras_moe.analysis.report.sections.trajectories import Trajectories

# In reading order.
SECTIONS: list[type[Section]] = [
    Overview,
    Loads,
    RoutingEntropies,
    Confidence,
    Priorities,
    DroppedPatches,
    Trajectories,
    Favourites,
    Explorer,
    Compute,
    MuMoEExperts,
    Pruning,
]
