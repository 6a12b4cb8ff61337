"""The headings under which the help of a command lists its options, in this order."""

from cyclopts import Group

TASKS = Group("Tasks", sort_key=0)
COMMON = Group("Common options", sort_key=1)
DISTILLATION = Group("Distillation", sort_key=2)
TASK = Group("Settings of the task", sort_key=2)
TRANSLATION = Group("Translation", sort_key=2)
CAPTIONS = Group("Captions", sort_key=2)
SEARCH = Group("Search", sort_key=2)
OPTIMIZER = Group("Optimizer", sort_key=3)
AUGMENTATION = Group("Augmentation", sort_key=4)
LOOP = Group("Training loop", sort_key=5)
MODEL = Group("Model", sort_key=6)
DATA = Group("Data", sort_key=7)
SPEED = Group("Devices and speed", sort_key=8)
