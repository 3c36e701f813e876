"""The exceptions fp8calib raises on purpose, each with the exit code of the command line.

Fp8CalibError                 3  our bug (never raised directly)
├── UserError                 2  the user's mistake, or an input we refuse
│   ├── ModelError               a model that cannot be opened or calibrated
│   ├── DataError                a dataset that cannot be read as calibration text
│   ├── RecipeError              a recipe that says something unknown or contradictory
│   ├── CheckpointError          a checkpoint that cannot be read, or should not be written
│   └── ScaleError               scales that are missing, of the wrong shape, or not usable
└── CheckFailed               1  a check ran and its answer is no

The message is one line for a person: what is wrong, where, and what to do.
"""


class Fp8CalibError(Exception):
    exit_code = 3


class UserError(Fp8CalibError):
    exit_code = 2


class ModelError(UserError):
    pass


class DataError(UserError):
    pass


class RecipeError(UserError):
    pass


class CheckpointError(UserError):
    pass


class ScaleError(UserError):
    pass


class CheckFailed(Fp8CalibError):
    exit_code = 1
