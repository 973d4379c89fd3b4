"""The purposes for which TensorFlow traces a graph.

They are private in TensorFlow 2.21, which has nothing public for them.
"""

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util


def for_xla() -> bool:
    """Whether XLA compiles what is traced now, and wants to know every shape.

    A function that has been traced for itself keeps its graph when a compiled function
    calls it later.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def for_gradients() -> bool:
    """Whether a tape records what runs now.

    Without one somebody may still ask for gradients, of a function that has been traced
    already.
    """
    return record.could_possibly_record()
