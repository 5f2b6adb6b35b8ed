// Files of tensors.
#include <cstring>
#include <vector>

#include "nn/base/check.h"
#include "tests/fuzz/inputs/input_target.h"
#include "train/checkpoint/safetensors.h"

namespace topknot::fuzz {
namespace {

void gradients(Bytes input) {
  static const Scratch scratch;
  const GradientsReader reader(scratch.write("gradients.safetensors", input));
  const std::size_t numel = reader.steps() * reader.size();
  expect(numel * sizeof(float) <= input.size(), "more values than the file has bytes");
  std::vector<float> values(numel);
  reader.read(0, values);
}

void safetensors(Bytes input) {
  const SafetensorsFile file = SafetensorsFile::parse({input.begin(), input.end()}, "input");
  std::size_t data = 0;
  for (const TensorView& tensor : file.tensors()) {
    expect(file.find(tensor.name) == &tensor, "a tensor is not found by its name");
    data += tensor.data.size();
  }
  expect(data <= input.size(), "more data than the file has bytes");
  std::vector<std::byte> again;
  write_safetensors([&](Bytes part) { again.insert(again.end(), part.begin(), part.end()); }, file.tensors(),
                    file.metadata());
  const SafetensorsFile copy = [&] {
    try {
      return SafetensorsFile::parse(again, "copy");
    } catch (const Error& error) {
      throw Finding(std::string("its own copy is refused: ") + error.what());
    }
  }();
  expect(copy.metadata() == file.metadata() && copy.tensors().size() == file.tensors().size(),
         "a copy differs");
  for (const TensorView& tensor : file.tensors()) {
    const TensorView* other = copy.find(tensor.name);
    expect(other && other->dtype == tensor.dtype && other->shape == tensor.shape, "a tensor's copy differs");
    expect(std::equal(tensor.data.begin(), tensor.data.end(), other->data.begin(), other->data.end()),
           "a tensor's data differ in the copy");
  }
}

const bool added = [] {
  input_targets().add("gradients", "recorded gradients", gradients);
  input_targets().add("safetensors", "a safetensors file", safetensors);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
