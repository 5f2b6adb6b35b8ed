#include "nn/ops/cpu/onednn.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "nn/base/check.h"
#include "nn/base/memory.h"

namespace topknot {

const dnnl::engine& dnnl_cpu_engine() {
  static const auto* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

namespace {

// Whether oneDNN will use it, so that ONEDNN_MAX_CPU_ISA keeps working.
bool onednn_uses(dnnl::cpu_isa wanted) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa()), bits = static_cast<unsigned>(wanted);
  return (isa & bits) == bits;
}

}  // namespace

int channel_block() {
  static const int block = onednn_uses(dnnl::cpu_isa::avx512_core) ? 16 : 8;
  return block;
}

bool cpu_has_bfloat16() {
  static const bool has = onednn_uses(dnnl::cpu_isa::avx512_core_bf16);
  return has;
}

std::string onednn_version() {
  const dnnl_version_t* v = ::dnnl_version();
  return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
}

dnnl::memory::data_type onednn_type(DType type) {
  return type == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc activation_desc(const Shape& shape, Layout layout, DType type) {
  using tag = dnnl::memory::format_tag;
  const tag blocked = channel_block() == 16 ? tag::nChw16c : tag::nChw8c;
  return {{shape[0], shape[1], shape[2], shape[3]},
          onednn_type(type),
          layout == Layout::plain ? tag::nchw : blocked};
}

void check_kernel_room() {
  constexpr std::size_t kRoom = 64 << 20;
  void* room = mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) throw OutOfMemory("room for a kernel of oneDNN", kRoom);
  munmap(room, kRoom);
}

dnnl::primitive_attr user_scratchpad() {
  check_kernel_room();
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

struct DnnlKernel::PerThread {
  dnnl::stream stream{dnnl_cpu_engine()};
  std::vector<dnnl::memory> memories;
  std::vector<dnnl_exec_arg_t> arguments;
};

DnnlKernel::DnnlKernel(const dnnl::primitive& primitive, const Arguments& arguments,
                       const dnnl::memory::desc& scratchpad, int threads, bool reads_unwritten)
    : primitive_(primitive),
      scratchpad_floats_((scratchpad.get_size() + 3) / 4),
      reads_unwritten_(reads_unwritten) {
  for (int t = 0; t < threads; ++t) {
    auto& mine = *threads_.emplace_back(std::make_unique<PerThread>());
    Arguments all = arguments;
    if (scratchpad_floats_) all.emplace_back(DNNL_ARG_SCRATCHPAD, scratchpad);
    for (const auto& [id, desc] : all) {
      mine.memories.emplace_back(desc, dnnl_cpu_engine(), nullptr);
      mine.arguments.push_back({id, mine.memories.back().get()});
    }
  }
}

DnnlKernel::~DnnlKernel() = default;

void DnnlKernel::run(int thread, std::initializer_list<const void*> pointers, const void* last) const {
  PerThread& mine = *threads_.at(static_cast<std::size_t>(thread));
  std::size_t i = 0;
  for (const void* pointer : pointers) mine.memories[i++].set_data_handle(const_cast<void*>(pointer));
  if (last) mine.memories[i++].set_data_handle(const_cast<void*>(last));
  std::vector<std::vector<std::byte>> inputs;  // with zeros after them
  for (std::size_t j = 0; reads_unwritten_ && j + 1 < i; ++j) {
    constexpr std::size_t kBehind = 256;  // bytes: four of the widest loads
    const std::size_t size = mine.memories[j].get_desc().get_size();
    std::memcpy(inputs.emplace_back(size + kBehind).data(), mine.memories[j].get_data_handle(), size);
    mine.memories[j].set_data_handle(inputs.back().data());
  }
  float* scratch = nullptr;
  if (scratchpad_floats_) {
    scratch = cpu_backend().allocate(scratchpad_floats_);
    if (reads_unwritten_) cpu_backend().fill_zero(scratch, scratchpad_floats_);
    mine.memories[i].set_data_handle(scratch);
  }
  const auto status = dnnl_primitive_execute(primitive_.get(), mine.stream.get(),
                                             static_cast<int>(mine.arguments.size()), mine.arguments.data());
  if (scratch) cpu_backend().release(scratch, scratchpad_floats_);
  TOPKNOT_CHECK(status == dnnl_success,
                fmt::format("oneDNN could not execute a primitive, status {}", static_cast<int>(status)));
}

struct DnnlPair::Kept {
  std::shared_ptr<const DnnlPair> pair;
  Tensor workspace;  // undefined if the primitives have none
};

DnnlPair::DnnlPair(const dnnl::primitive_desc& forward, DnnlKernel::Arguments forward_arguments,
                   const dnnl::primitive_desc& backward, DnnlKernel::Arguments backward_arguments) {
  const dnnl::memory::desc workspace = forward.workspace_desc();
  if (workspace.get_size() > 0) {
    forward_arguments.emplace_back(DNNL_ARG_WORKSPACE, workspace);
    backward_arguments.emplace_back(DNNL_ARG_WORKSPACE, workspace);
    workspace_floats_ = static_cast<std::int64_t>((workspace.get_size() + sizeof(float) - 1) / sizeof(float));
  }
  const auto kernel = [](const dnnl::primitive_desc& desc, const DnnlKernel::Arguments& arguments) {
    return std::make_unique<DnnlKernel>(dnnl::primitive(desc), arguments, desc.scratchpad_desc(), 1);
  };
  forward_ = kernel(forward, forward_arguments);
  backward_ = kernel(backward, backward_arguments);
}

std::shared_ptr<const void> DnnlPair::forward(std::shared_ptr<const DnnlPair> pair,
                                              std::initializer_list<const void*> pointers) {
  Tensor workspace = pair->workspace_floats_ ? Tensor::empty({pair->workspace_floats_}) : Tensor();
  pair->forward_->run(0, pointers, workspace.defined() ? workspace.data() : nullptr);
  return std::make_shared<Kept>(Kept{std::move(pair), std::move(workspace)});
}

void DnnlPair::backward(const std::shared_ptr<const void>& state,
                        std::initializer_list<const void*> pointers) {
  const Kept& kept = *static_cast<const Kept*>(state.get());
  kept.pair->backward_->run(0, pointers, kept.workspace.defined() ? kept.workspace.data() : nullptr);
}

}  // namespace topknot
