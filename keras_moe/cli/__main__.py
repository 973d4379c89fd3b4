"""`python -m keras_moe.cli`, the same as `keras-moe`."""

import sys

from keras_moe.cli.main import main

sys.exit(main())
