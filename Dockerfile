# For systems other than Debian 12:
#   docker build -t topknot .
#   docker run --rm -it -v "$PWD/runs:/topknot/runs" topknot              the demo; its report lands in ./runs/demo
#   docker run --rm -it topknot make test
#   docker run --rm -it -v DATA:/data -v "$PWD/runs:/topknot/runs" topknot \
#     build/bin/train configs/cifar10_resnet20_gaussiank.yaml data.root=/data
# The image has no CUDA: what it builds computes on the CPU.
FROM debian:12
WORKDIR /topknot
# A minimal image lacks make, which install-deps brings. Packages first: this layer survives changes to the sources.
COPY scripts/packages scripts/install-deps scripts/doctor scripts/
RUN scripts/install-deps
COPY . .
RUN make build
CMD ["make", "demo"]
