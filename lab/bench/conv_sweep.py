"""The convolutions of `lab/bench/against-pytorch conv`: those of the networks that are here, and odd ones. A geometry is
(input channels, output channels, height, width, kernel, stride, padding, groups, batch). Up to 3 input channels are an image,
which needs no gradient."""


def square(channels, outputs, side, kernel, stride=1, padding=None, groups=1, batch=8):
    return (channels, outputs, side, side, kernel, stride, kernel // 2 if padding is None else padding, groups, batch)


def depthwise(channels, side, kernel, stride=1, batch=8):
    return square(channels, channels, side, kernel, stride, groups=channels, batch=batch)


GEOMETRIES = {
    "ResNet-20": [
        square(3, 16, 32, 3, batch=128),
        square(16, 16, 32, 3, batch=128),
        square(16, 32, 32, 3, 2, batch=128),
        square(32, 32, 16, 3, batch=128),
        square(32, 64, 16, 3, 2, batch=128),
        square(64, 64, 8, 3, batch=128),
    ],
    "VGG-16, CIFAR": [
        square(3, 64, 32, 3, batch=32),
        square(64, 64, 32, 3, batch=32),
        square(64, 128, 16, 3, batch=32),
        square(128, 128, 16, 3, batch=32),
        square(256, 256, 8, 3, batch=32),
        square(256, 512, 4, 3, batch=32),
        square(512, 512, 4, 3, batch=32),
        square(512, 512, 2, 3, batch=32),
    ],
    "VGG-16, 224": [
        square(64, 64, 224, 3),
        square(128, 128, 112, 3),
        square(256, 256, 56, 3),
        square(512, 512, 28, 3),
        square(512, 512, 14, 3),
    ],
    "ResNet-50": [
        square(3, 64, 224, 7, 2),
        square(64, 64, 56, 1),
        square(64, 64, 56, 3),
        square(64, 256, 56, 1),
        square(256, 64, 56, 1),
        square(128, 128, 56, 3, 2),
        square(128, 512, 28, 1),
        square(512, 128, 28, 1),
        square(256, 512, 56, 1, 2),
        square(256, 256, 14, 3),
        square(1024, 256, 14, 1),
        square(512, 512, 7, 3),
        square(512, 2048, 7, 1),
        square(2048, 512, 7, 1),
    ],
    "AlexNet": [
        square(3, 64, 224, 11, 4, 2),
        square(64, 192, 27, 5),
        square(192, 384, 13, 3),
        square(384, 256, 13, 3),
        square(96, 256, 27, 5, groups=2),
        square(384, 384, 13, 3, groups=2),
    ],
    "LeNet": [square(1, 6, 28, 5, batch=64), square(6, 16, 14, 5, padding=0, batch=64)],
    "SqueezeNet": [
        square(3, 96, 224, 7, 2, 0),
        square(96, 16, 54, 1),
        square(16, 64, 54, 1),
        square(16, 64, 54, 3),
        square(512, 1000, 13, 1),
    ],
    "MobileNetV2": [
        square(3, 32, 224, 3, 2),
        depthwise(32, 112, 3),
        square(16, 96, 112, 1),
        depthwise(96, 112, 3, 2),
        square(24, 144, 56, 1),
        depthwise(144, 56, 3),
        square(144, 24, 56, 1),
        depthwise(960, 7, 3),
        square(320, 1280, 7, 1),
    ],
    "ShuffleNetV2": [square(24, 58, 56, 1), depthwise(58, 28, 3), square(58, 58, 28, 1), square(464, 1024, 7, 1)],
    "EfficientNet": [depthwise(144, 56, 5, 2), depthwise(240, 28, 5), square(40, 240, 28, 1), depthwise(672, 14, 5)],
    "Inception-v4": [square(32, 32, 149, 3, padding=0), square(64, 96, 73, 3, padding=0), square(384, 256, 17, 1)],
    "odd": [
        square(64, 10, 8, 1, batch=128),
        square(1, 1, 28, 3, batch=64),
        square(5, 7, 28, 3, batch=32),
        square(17, 33, 16, 3, batch=32),
        square(100, 100, 14, 3),
        square(30, 60, 12, 5, batch=32),
        square(20, 50, 12, 5, padding=0, batch=64),
        square(2048, 10, 1, 1, batch=64),
        square(256, 256, 14, 3, groups=32),
        square(64, 64, 56, 3, batch=1),
        square(512, 512, 14, 3, batch=1),
        square(128, 128, 28, 3, 2, batch=2),
        square(3, 10, 32, 5, batch=64),
        square(48, 48, 12, 7, batch=16),
        square(7, 128, 20, 2, 2, 0, batch=32),
    ],
}


def describe(geometry):
    channels, outputs, height, width, kernel, stride, padding, groups, batch = geometry
    kind = ", depthwise" if groups == channels > 1 else f", {groups} groups" if groups > 1 else ""
    return (
        f"{channels} to {outputs}, {height}x{width}, {kernel}x{kernel}"
        + (f", stride {stride}" if stride > 1 else "")
        + (f", padding {padding}" if padding != kernel // 2 else "")
        + kind
        + f", batch {batch}"
    )
