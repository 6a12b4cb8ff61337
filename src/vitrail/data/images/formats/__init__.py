"""Data sets on disk: class folders, CIFAR, MNIST (IDX) and the ReaL labels of ImageNet."""
