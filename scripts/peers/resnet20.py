"""PyTorch peer: ResNet-20 for CIFAR, forward, backward and SGD."""

from networks import main

if __name__ == "__main__":
    main("resnet20", default_batch=128)
