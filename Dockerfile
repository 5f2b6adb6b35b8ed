# For systems other than Debian 12:
#   docker build -t topknot .
#   docker run --rm -it -v "$PWD/runs:/topknot/runs" topknot              runs the demo; its report is in ./runs/demo
#   docker run --rm -it topknot make test
#   docker run --rm -it -v DATA:/data -v "$PWD/runs:/topknot/runs" topknot \
#     build/bin/train configs/cifar10_resnet20_gaussiank.yaml data.root=/data
# The image has no CUDA; its programs compute on the CPU. Dockerfile.cuda makes one that has it.
FROM debian:12
WORKDIR /topknot
# A minimal image lacks make, which install-deps installs. The packages come first, so changes to the sources keep this layer.
COPY scripts/packages scripts/install-deps scripts/doctor scripts/
RUN scripts/install-deps
COPY . .
RUN make build
CMD ["make", "demo"]
