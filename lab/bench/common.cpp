#include "lab/bench/common.h"

#include <omp.h>

#include "nn/base/check.h"
#include "nn/core/device.h"
#include "nn/core/simd.h"

namespace topknot::bench {

bool parse_common(CLI::App& app, CommonOptions& options, const char* text, int argc, char** argv) {
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  app.add_option("--size", options.size)->check(CLI::PositiveNumber);
  app.add_option("--stream", options.streams)->check(CLI::IsMember(GradientStream::names()))->expected(1);
  app.add_flag("--json", options.json);
  if (!parse_options(app, text, argc, argv, false)) return false;
  omp_set_num_threads(options.threads);
  return true;
}

TOPKNOT_MULTIVERSION void add(float* r, const float* g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) r[i] += g[i];
}

void plain_pass(std::span<float> r, std::span<const float> g) {
  for_parts(r.size(), part_count(r.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    add(r.data() + begin, g.data() + begin, end - begin);
  });
}

Buffers::Buffers(std::size_t size) {
  for (std::span<float>* buffer : {&gradient, &residual, &plain_r, &plain_g})
    *buffer = {cpu_backend().allocate(size), size};
  clear();
}

Buffers::~Buffers() {
  for (const auto& buffer : {gradient, residual, plain_r, plain_g})
    cpu_backend().release(buffer.data(), buffer.size());
}

void Buffers::clear() {
  for (const auto& buffer : {gradient, residual, plain_r})
    cpu_backend().fill_zero(buffer.data(), buffer.size());
}

}  // namespace topknot::bench
