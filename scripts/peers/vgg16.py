"""PyTorch peer: VGG-16 with batch norm for CIFAR, forward, backward and SGD."""

from networks import main

if __name__ == "__main__":
    main("vgg16", default_batch=32)
