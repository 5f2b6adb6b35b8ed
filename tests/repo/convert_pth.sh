#!/usr/bin/env bash
# scripts/convert-pth and Topknot read and write each other's files.
#   convert_pth.sh ROOT names TRAIN    torchvision's names to Topknot's and back, in safetensors files; `train` reads them
#   convert_pth.sh ROOT torch TRAIN    the same from and to .pth files, with PyTorch
# PEER_PYTHONS names the interpreters that may have PyTorch (default: python3).
set -euo pipefail
root=$(cd "${1:?usage: convert_pth.sh ROOT names|torch TRAIN}" && pwd)
part=${2:?usage: convert_pth.sh ROOT names|torch TRAIN}
train=${3:?usage: convert_pth.sh ROOT names|torch TRAIN}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v python3 >/dev/null || { echo "skipped: no python3"; exit 0; }
python=python3
if [ "$part" = torch ]; then
  python=
  for candidate in ${PEER_PYTHONS:-python3}; do
    "$candidate" -c 'import torch' 2>/dev/null && { python=$candidate; break; }
  done
  [ -n "$python" ] || { echo "skipped: no Python with PyTorch (PEER_PYTHONS names some)"; exit 0; }
fi

PYTHONDONTWRITEBYTECODE=1 "$python" - "$root/scripts/convert-pth" "$part" "$work" <<'END'
import importlib.machinery, importlib.util, random, struct, sys

path, part, work = sys.argv[1:]
loader = importlib.machinery.SourceFileLoader("convert_pth", path)
convert = importlib.util.module_from_spec(importlib.util.spec_from_loader("convert_pth", loader))
loader.exec_module(convert)

# torchvision's resnet18 with ten classes and a 3x3 stem.
random.seed(1)
tensors = {}


def add(name, *shape, dtype="F32"):
    count = 1
    for dim in shape:
        count *= dim
    tensors[name] = (dtype, list(shape), random.randbytes(count * 4) if dtype == "F32" else struct.pack("<q", 7))
    if dtype == "F32":  # small finite floats: no exponent beyond 2^-1
        data = bytearray(tensors[name][2])
        data[3::4] = bytes(byte & 0xBE for byte in data[3::4])
        tensors[name] = (dtype, list(shape), bytes(data))


def conv_bn(conv, bn, out, inputs, kernel):
    add(f"{conv}.weight", out, inputs, kernel, kernel)
    for last in ("weight", "bias", "running_mean", "running_var"):
        add(f"{bn}.{last}", out)
    add(f"{bn}.num_batches_tracked", dtype="I64")


conv_bn("conv1", "bn1", 64, 3, 3)
inputs = 64
for stage, width in enumerate((64, 128, 256, 512), 1):
    for block in range(2):
        prefix = f"layer{stage}.{block}"
        conv_bn(f"{prefix}.conv1", f"{prefix}.bn1", width, inputs, 3)
        conv_bn(f"{prefix}.conv2", f"{prefix}.bn2", width, width, 3)
        if inputs != width:
            conv_bn(f"{prefix}.downsample.0", f"{prefix}.downsample.1", width, inputs, 1)
        inputs = width
add("fc.weight", 10, 512)
add("fc.bias", 10)


def run(*words, status=0):
    sys.argv = ["convert-pth", *words]
    assert convert.main() == status, words


def equal(found, expected):
    assert list(found) == list(expected), (list(found)[:4], list(expected)[:4])
    for name in found:
        assert found[name] == expected[name], name


original, ours, back = f"{work}/original", f"{work}/ours.safetensors", f"{work}/back"
zeroed = {n: (t if t[0] == "F32" else ("I64", [], struct.pack("<q", 0))) for n, t in tensors.items()}
if part == "names":
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    convert.write_safetensors(f"{original}.safetensors", wrapped, {"from": "test"})
    run(f"{original}.safetensors", f"{work}/same.safetensors")  # names stay for the one reader of wrappers' prefixes
    equal(convert.read_safetensors(f"{work}/same.safetensors")[0], wrapped)
    assert convert.nanogpt_metadata({"n_layer": 2, "n_head": 4, "n_embd": 8, "block_size": 6, "bias": False}) == {
        "config": "model.name: gpt\nmodel.gelu: exact\nmodel.layers: 2\nmodel.heads: 4\nmodel.width: 8\n"
                  "model.context: 6\nmodel.bias: false\n"}
    run(f"{original}.safetensors", ours, "--names", "topknot")
    named, metadata = convert.read_safetensors(ours)
    assert metadata == {"from": "test"}
    for theirs, name in {
        "conv1.weight": "stem.conv.weight", "bn1.weight": "stem.bn.gamma", "bn1.bias": "stem.bn.beta",
        "bn1.running_mean": "stem.bn.running_mean", "bn1.running_var": "stem.bn.running_variance",
        "layer1.0.conv1.weight": "stage1.block1.1.conv.weight", "layer1.0.bn2.weight": "stage1.block1.2.bn.gamma",
        "layer4.1.conv2.weight": "stage4.block2.2.conv.weight", "layer4.1.bn2.bias": "stage4.block2.2.bn.beta",
        "layer2.0.downsample.0.weight": "stage2.block1.shortcut.conv.weight",
        "layer2.0.downsample.1.running_var": "stage2.block1.shortcut.bn.running_variance",
        "fc.weight": "fc.weight", "fc.bias": "fc.bias",
    }.items():
        assert named[name] == tensors[theirs], name
    assert len(named) == sum(dtype == "F32" for dtype, _, _ in tensors.values())
    run(ours, f"{back}.safetensors", "--names", "torchvision")
    equal(convert.read_safetensors(f"{back}.safetensors")[0], zeroed)
    # By order: any names, the last part apart, and shapes of as many elements.
    other = {f"layers.{i}.{name.rpartition('.')[2]}": t for i, (name, t) in enumerate(tensors.items())}
    first = next(iter(other))
    other[first] = ("F32", [64, 27], other[first][2])
    convert.write_safetensors(f"{original}.safetensors", other, {})
    run(f"{original}.safetensors", f"{work}/like.safetensors", "--like", ours)
    assert convert.read_safetensors(f"{work}/like.safetensors")[0] == named
    names = list(other)
    for wrong in ({n: t for n, t in other.items() if n != names[-1]},  # one too few
                  {n: other[n] for n in [names[6], *names[1:6], names[0], *names[7:]]},  # another order
                  {n: other[n] for n in [names[0], names[2], names[1], *names[3:]]}):  # of as many elements
        convert.write_safetensors(f"{original}.safetensors", wrong, {})
        run(f"{original}.safetensors", f"{work}/no.safetensors", "--like", ours, status=1)
    # Other precisions become F32.
    half = {"fc.bias": ("F16", [2], struct.pack("<2e", 1.5, -2)), "fc.weight": ("BF16", [1, 1], b"\x80\x3f")}
    convert.write_safetensors(f"{original}.safetensors", half, {})
    run(f"{original}.safetensors", f"{work}/half.safetensors", "--names", "topknot")
    equal(convert.read_safetensors(f"{work}/half.safetensors")[0],
          {"fc.bias": ("F32", [2], struct.pack("<2f", 1.5, -2)), "fc.weight": ("F32", [1, 1], struct.pack("<f", 1))})
    # What is wrong is refused, and nothing is written.
    convert.write_safetensors(f"{original}.safetensors", {"encoder.weight": ("F32", [], bytes(4))}, {})
    run(f"{original}.safetensors", f"{work}/no.safetensors", "--names", "topknot", status=1)
    with open(f"{work}/cut.safetensors", "wb") as file:
        file.write(open(ours, "rb").read()[:-1])
    run(f"{work}/cut.safetensors", f"{work}/no.safetensors", status=1)
    with open(f"{work}/pointer.pth", "w") as file:
        file.write("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    try:
        convert.check_format(f"{work}/pointer.pth")
        raise AssertionError("a Git LFS pointer is taken")
    except convert.Refused as error:
        assert "git lfs pull" in str(error)
    run(f"{work}/absent.safetensors", f"{work}/no.safetensors", status=1)
    import os
    assert not os.path.exists(f"{work}/no.safetensors")
    # A file that is there is replaced where --overwrite says so, and never in the checkpoints of a run.
    half = open(f"{work}/half.safetensors", "rb").read()
    run(ours, f"{work}/half.safetensors", status=1)
    assert open(f"{work}/half.safetensors", "rb").read() == half
    run(ours, f"{work}/half.safetensors", "--overwrite")
    assert convert.read_safetensors(f"{work}/half.safetensors")[0] == named
    step = f"{work}/run/checkpoints/step-000000003"
    os.makedirs(step)
    open(f"{step}/manifest.json", "w").close()
    os.symlink(step, f"{work}/link")
    run(ours, f"{work}/link/model.safetensors", "--overwrite", status=1)
    assert os.listdir(step) == ["manifest.json"]
else:
    import torch

    state = {}
    for name, (dtype, shape, data) in tensors.items():
        torch_type = torch.float32 if dtype == "F32" else torch.int64
        state[name] = torch.frombuffer(bytearray(data), dtype=torch_type).reshape(shape)
    torch.save({"epoch": 3, "state_dict": state}, f"{original}.pth")
    run(f"{original}.pth", ours, "--names", "topknot")
    run(ours, f"{back}.pth", "--names", "torchvision")
    found = torch.load(f"{back}.pth", weights_only=True)
    assert list(found) == list(state)
    for name in state:
        expected = state[name] if state[name].dtype == torch.float32 else torch.zeros_like(state[name])
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape, name
        assert torch.equal(found[name], expected), name
    # Without names: every dtype, unchanged.
    every = {str(t): torch.arange(6).reshape(2, 3).to(t) for t in convert.dtypes(torch).values()}
    every["strided"], every["none"] = torch.arange(12.0).reshape(3, 4).t(), torch.empty(0, 3)
    torch.save(every, f"{original}.pth")
    run(f"{original}.pth", f"{work}/every.safetensors")
    run(f"{work}/every.safetensors", f"{back}.pth", "--overwrite")
    found = torch.load(f"{back}.pth", weights_only=True)
    assert set(found) == set(every)
    for name in every:
        assert found[name].dtype == every[name].dtype and torch.equal(found[name], every[name]), name
    # nanoGPT's checkpoints, of a compiled model: names as they are, and the configuration.
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 6, "bias": False, "vocab_size": 11, "dropout": 0.0}
    torch.save({"model": {"_orig_mod.transformer.wte.weight": torch.ones(11, 8)}, "model_args": sizes, "iter_num": 1},
               f"{original}.pth")
    run(f"{original}.pth", f"{work}/nano.safetensors")
    nano, metadata = convert.read_safetensors(f"{work}/nano.safetensors")
    assert list(nano) == ["_orig_mod.transformer.wte.weight"]
    assert metadata == {"format": "pt"} | convert.nanogpt_metadata(sizes) and "model.heads: 2" in metadata["config"]
    torch.save({"model": every, "optimizer": object()}, f"{original}.pth")
    run(f"{original}.pth", f"{work}/no.safetensors", status=1)  # an object is never unpickled
END

resnet18=(model.name=resnet18 data.name=synthetic_images data.train_size=64 data.test_size=64)
"$train" "${resnet18[@]}" "model.init_from=$work/ours.safetensors" --validate >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$train" "${resnet18[@]}" data.classes=7 "model.init_from=$work/ours.safetensors" --validate >"$work/log" 2>&1 &&
  { echo "a file for ten classes is taken for seven"; exit 1; }
grep -q 'fc.weight: \[10, 512\] F32 in the file, \[7, 512\] F32 in the model' "$work/log" || { cat "$work/log"; exit 1; }
echo "done"
