"""The headings under which the help of a command lists its options, in the order in which they are needed."""

from cyclopts import Group

TASKS = Group("Tasks", sort_key=0)
COMMON = Group("Common options", sort_key=1)
DISTILLATION = Group("Distillation", sort_key=2)
TASK = Group("Settings of the task", sort_key=2)
SEARCH = Group("Search", sort_key=2)
MODEL = Group("Model", sort_key=3)
DATA = Group("Data", sort_key=4)
AUGMENTATION = Group("Augmentation", sort_key=5)
OPTIMIZER = Group("Optimizer", sort_key=6)
LOOP = Group("Training loop", sort_key=7)
SPEED = Group("Devices and speed", sort_key=8)
TRANSLATION = Group("Translation", sort_key=9)
CAPTIONS = Group("Captions", sort_key=10)
NETWORK = Group("Network", sort_key=11)
LIMITS = Group("Limits", sort_key=12)
FIRST_OPTIONS = (  # of the common ones, before all others
    *("--teacher", "--data", "--init", "--model", "--recipe", "--epochs", "--minutes", "--lr", "--batch", "--threads"),
    *("--seed", "--out", "--resume"),
)
