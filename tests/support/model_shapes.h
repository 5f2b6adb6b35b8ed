#pragma once
// The parameters of the models whose ratios the Deep Gradient Compression paper publishes.

#include <vector>

#include "compress/byte_count.h"

namespace topknot::test {

inline void add_tensor(std::vector<TensorShape>& shapes, std::size_t rows, std::size_t cols) {
  shapes.push_back({rows * cols, false});
}
inline void add_vector(std::vector<TensorShape>& shapes, std::size_t numel) {
  shapes.push_back({numel, true});
}

// CaffeNet's: convolutions 2, 4 and 5 in two groups.
inline std::vector<TensorShape> alexnet_shapes() {
  std::vector<TensorShape> shapes;
  const std::size_t layers[][2] = {{96, 3 * 121},  {256, 48 * 25}, {384, 256 * 9}, {384, 192 * 9},
                                   {256, 192 * 9}, {4096, 9216},   {4096, 4096},   {1000, 4096}};
  for (const auto& [out, in] : layers) {
    add_tensor(shapes, out, in);
    add_vector(shapes, out);
  }
  return shapes;
}

inline std::vector<TensorShape> resnet50_shapes() {
  std::vector<TensorShape> shapes;
  const auto convolution = [&](std::size_t out, std::size_t in, std::size_t area) {
    add_tensor(shapes, out, in * area);
    add_vector(shapes, out);  // batch normalisation: scale
    add_vector(shapes, out);  // and shift
  };
  convolution(64, 3, 49);
  std::size_t in = 64;
  const std::size_t stages[][2] = {{64, 3}, {128, 4}, {256, 6}, {512, 3}};
  for (const auto& [width, blocks] : stages)
    for (std::size_t block = 0; block < blocks; ++block) {
      convolution(width, in, 1);
      convolution(width, width, 9);
      convolution(4 * width, width, 1);
      if (block == 0) convolution(4 * width, in, 1);
      in = 4 * width;
    }
  add_tensor(shapes, 1000, 2048);
  add_vector(shapes, 1000);
  return shapes;
}

// Two layers of 1500 units over the Penn Treebank's 10000 words, each layer with two bias vectors, the
// embedding used again as the last layer's matrix: 51 034 000 parameters are the published 194.68 MiB.
inline std::vector<TensorShape> ptb_lstm_shapes() {
  std::vector<TensorShape> shapes;
  add_tensor(shapes, 10000, 1500);
  for (int layer = 0; layer < 2; ++layer)
    for (int side = 0; side < 2; ++side) {  // input and recurrent
      add_tensor(shapes, 4 * 1500, 1500);
      add_vector(shapes, 4 * 1500);
    }
  add_vector(shapes, 10000);
  return shapes;
}

}  // namespace topknot::test
