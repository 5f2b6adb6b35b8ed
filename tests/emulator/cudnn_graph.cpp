// cuDNN's graph API on the machine of machine.h: descriptors with typed attributes, refused as cuDNN 9.19
// refuses them, and plans for one graph, a convolution's weight gradient from bfloat16 with an identity behind
// it that writes fp32. As cuDNN's heuristics do, these name no engine for the gradient alone, for groups, and
// for channels that are no whole eights.
#include <cstring>
#include <map>
#include <memory>

#include "tests/emulator/cudnn_convolution.h"
#include "tests/emulator/machine_state.h"

namespace topknot::emulator {
namespace {

struct Descriptor;
using Shared = std::shared_ptr<Descriptor>;  // a cudnnBackendDescriptor_t points to one

struct Attribute {
  std::vector<std::byte> bytes;
  std::vector<Shared> descriptors;
};

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  bool finalized = false;
  std::map<int, Attribute> attributes;
  std::vector<ConvolutionPlan> plans;  // of heuristics; one, of a configuration, its engine and its plan
  Shared graph;                        // beside them

  bool has(int name) const { return attributes.count(name) > 0; }
  const Shared& descriptor(int name, std::size_t i = 0) const {
    return attributes.at(name).descriptors.at(i);
  }
  template <class T>
  std::vector<T> all(int name) const {
    const auto& bytes = attributes.at(name).bytes;
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  template <class T>
  T value(int name) const {
    T value;
    std::memcpy(&value, attributes.at(name).bytes.data(), sizeof value);
    return value;
  }
};

struct Rule {
  cudnnBackendAttributeType_t type;
  std::size_t size;  // of an element
  std::int64_t least, most;
  bool needed = true;
};

constexpr auto kInt = CUDNN_TYPE_INT64;
constexpr auto kOther = CUDNN_TYPE_BACKEND_DESCRIPTOR;

// What may be set of each type of descriptor.
const std::map<int, Rule>& rules(cudnnBackendDescriptorType_t type) {
  const Rule one{kInt, 8, 1, 1}, two{kInt, 8, 2, 2}, four{kInt, 8, 4, 4}, other{kOther, 8, 1, 1},
      data_type{CUDNN_TYPE_DATA_TYPE, 4, 1, 1}, scale{CUDNN_TYPE_FLOAT, 4, 1, 1},
      handle{CUDNN_TYPE_HANDLE, 8, 1, 1};
  static const std::map<cudnnBackendDescriptorType_t, std::map<int, Rule>> all{
      {CUDNN_BACKEND_TENSOR_DESCRIPTOR,
       {{CUDNN_ATTR_TENSOR_DATA_TYPE, data_type},
        {CUDNN_ATTR_TENSOR_DIMENSIONS, four},
        {CUDNN_ATTR_TENSOR_STRIDES, four},
        {CUDNN_ATTR_TENSOR_UNIQUE_ID, one},
        {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, one},
        {CUDNN_ATTR_TENSOR_IS_VIRTUAL, {CUDNN_TYPE_BOOLEAN, 1, 1, 1, false}}}},
      {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR,
       {{CUDNN_ATTR_CONVOLUTION_COMP_TYPE, data_type},
        {CUDNN_ATTR_CONVOLUTION_CONV_MODE, {CUDNN_TYPE_CONVOLUTION_MODE, 4, 1, 1}},
        {CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, one},
        {CUDNN_ATTR_CONVOLUTION_DILATIONS, two},
        {CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, two},
        {CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, two},
        {CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, two}}},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
       {{CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, scale},
        {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, scale},
        {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, other},
        {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, other},
        {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, other},
        {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, other}}},
      {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
       {{CUDNN_ATTR_POINTWISE_MODE, {CUDNN_TYPE_POINTWISE_MODE, 4, 1, 1}},
        {CUDNN_ATTR_POINTWISE_MATH_PREC, data_type}}},
      {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
       {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, other},
        {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, other},
        {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, other}}},
      {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
       {{CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle}, {CUDNN_ATTR_OPERATIONGRAPH_OPS, {kOther, 8, 1, 64}}}},
      {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
       {{CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, other},
        {CUDNN_ATTR_ENGINEHEUR_MODE, {CUDNN_TYPE_HEUR_MODE, 4, 1, 1}}}},
      {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
       {{CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle}, {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, other}}},
      {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
       {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, {kInt, 8, 1, 64}},
        {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, {CUDNN_TYPE_VOID_PTR, 8, 1, 64}},
        {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, {CUDNN_TYPE_VOID_PTR, 8, 1, 1, false}}}},
      {CUDNN_BACKEND_ENGINE_DESCRIPTOR, {}},
      {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, {}}};
  const static std::map<int, Rule> none;
  const auto found = all.find(type);
  return found == all.end() ? none : found->second;
}

std::array<int, 4> ints(const std::vector<std::int64_t>& values) {
  std::array<int, 4> four{};
  for (std::size_t i = 0; i < values.size(); ++i) four.at(i) = int(values[i]);
  return four;
}
template <class T>
T dense(const Descriptor& tensor) {
  T t;
  t.type = tensor.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
  t.dims = ints(tensor.all<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS));
  t.strides = ints(tensor.all<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES));
  return t;
}
cudnnConvolutionStruct convolution_of(const Descriptor& descriptor) {
  cudnnConvolutionStruct conv;
  const auto pair = [&](int name) {
    const auto four = ints(descriptor.all<std::int64_t>(name));
    return std::array<int, 2>{four[0], four[1]};
  };
  conv.padding = pair(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  conv.stride = pair(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  return conv;
}

// The tensors of the one graph that there are engines for.
struct Pattern {
  Shared x, dy, inner, dw, conv;
  explicit operator bool() const { return dw != nullptr; }
};
Pattern match(const Descriptor& graph) {
  const auto& ops = graph.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).descriptors;
  if (ops.size() != 2 || ops[0]->type != CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR ||
      ops[1]->type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
    return {};
  const Descriptor &product = *ops[0], &pointwise = *ops[1];
  Pattern p{product.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X),
            product.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY),
            product.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW),
            pointwise.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_YDESC),
            product.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC)};
  const auto x = dense<cudnnTensorStruct>(*p.x), dy = dense<cudnnTensorStruct>(*p.dy);
  const auto dw = dense<cudnnFilterStruct>(*p.dw);
  const auto mode = pointwise.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)
                        ->value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
  const bool offered =
      x.type == CUDNN_DATA_BFLOAT16 && dy.type == CUDNN_DATA_BFLOAT16 && dw.type == CUDNN_DATA_FLOAT &&
      mode == CUDNN_POINTWISE_IDENTITY && p.inner->has(CUDNN_ATTR_TENSOR_IS_VIRTUAL) &&
      p.inner->value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL) && x.strides[1] == 1 && dy.strides[1] == 1 &&
      dw.strides[1] == 1 && x.dims[1] == dw.dims[1] && x.dims[1] % 8 == 0 && dy.dims[1] % 8 == 0;
  return offered && pointwise.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_XDESC) == p.inner ? p : Pattern{};
}

cudnnStatus_t finalize_product(const Descriptor& op) {
  const auto x = dense<cudnnTensorStruct>(*op.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X)),
             y = dense<cudnnTensorStruct>(*op.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY));
  const auto w = dense<cudnnFilterStruct>(*op.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW));
  const auto conv = convolution_of(*op.descriptor(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC));
  const auto out = [&](std::size_t d) {
    return (x.dims[d] + 2 * conv.padding[d - 2] - w.dims[d]) / conv.stride[d - 2] + 1;
  };
  const std::array<int, 4> expected{x.dims[0], w.dims[0], out(2), out(3)};
  return y.dims == expected && x.dims[1] % w.dims[1] == 0 ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t finalize_tensor(const Descriptor& tensor) {
  const auto t = dense<cudnnTensorStruct>(tensor);
  const auto alignment = tensor.value<std::int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  bool good = alignment > 0 && alignment % std::int64_t(size_of(t.type)) == 0;
  for (std::size_t d = 0; d < 4; ++d) good = good && t.dims[d] > 0 && t.strides[d] > 0;
  return good ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t finalize(Descriptor& d) {
  if (d.finalized) return CUDNN_STATUS_BAD_PARAM;
  const bool holder =
      d.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR || d.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
  for (const auto& [name, rule] : rules(d.type)) {
    if (rule.needed && !d.has(name))
      return d.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ? CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED
                                                               : CUDNN_STATUS_BAD_PARAM;
    if (rule.type == kOther)
      for (const Shared& other : d.attributes.at(name).descriptors)
        if (!other->finalized) return holder ? CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED : CUDNN_STATUS_BAD_PARAM;
  }
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return finalize_tensor(d);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return finalize_product(d);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: {
      d.graph = d.descriptor(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
      const auto mode = d.value<cudnnBackendHeurMode_t>(CUDNN_ATTR_ENGINEHEUR_MODE);
      if (match(*d.graph))
        for (const ConvolutionPlan& plan : convolutions().plans)
          if (plan.mode == mode) d.plans.push_back(plan);
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: {
      const Descriptor& configuration = *d.descriptor(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
      d.plans = configuration.plans, d.graph = configuration.graph;
      const std::lock_guard lock(state().mutex);
      if (captures() || !d.plans[0].compiles) return CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER;
      ++convolutions().compiled;
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      return d.all<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS).size() ==
                     d.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).size()
                 ? CUDNN_STATUS_SUCCESS
                 : CUDNN_STATUS_BAD_PARAM;
    default:
      return CUDNN_STATUS_SUCCESS;
  }
}

// The numbers and descriptors that can be asked for.
cudnnStatus_t get(const Descriptor& d, int name, cudnnBackendAttributeType_t type, std::int64_t most,
                  std::int64_t* count, void* out) {
  const bool configurations = name == CUDNN_ATTR_ENGINEHEUR_RESULTS;
  if (configurations || name == CUDNN_ATTR_ENGINECFG_ENGINE) {
    if (type != kOther) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
    *count =
        configurations && most > 0 ? std::min<std::int64_t>(most, std::ssize(d.plans)) : std::ssize(d.plans);
    for (std::int64_t i = 0; i < std::min(most, *count); ++i) {  // into descriptors that the caller made
      Descriptor& made = **static_cast<Shared**>(out)[i];
      if (made.type !=
          (configurations ? CUDNN_BACKEND_ENGINECFG_DESCRIPTOR : CUDNN_BACKEND_ENGINE_DESCRIPTOR))
        return CUDNN_STATUS_BAD_PARAM;
      made.plans = {d.plans[std::size_t(i)]}, made.graph = d.graph, made.finalized = true;
    }
    return CUDNN_STATUS_SUCCESS;
  }
  if (type != kInt) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
  if (most != 1 ||
      (name != CUDNN_ATTR_ENGINE_GLOBAL_INDEX && name != CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE))
    return CUDNN_STATUS_BAD_PARAM;
  *count = 1;
  *static_cast<std::int64_t*>(out) =
      name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX ? d.plans[0].engine : std::int64_t(d.plans[0].workspace);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t execute(cudnnHandle_t handle, const Descriptor& plan, const Descriptor& pack) {
  const ConvolutionPlan& by = plan.plans[0];
  const Pattern p = match(*plan.graph);
  const auto ids = pack.all<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  const auto data = [&](const Descriptor& tensor) -> void* {
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (ids[i] == tensor.value<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID) && pointers[i]) {
        const auto alignment = tensor.value<std::uint64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
        if (reinterpret_cast<std::uintptr_t>(pointers[i]) % alignment != 0)
          status = CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
        return pointers[i];
      }
    status = CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    return nullptr;
  };
  void *x = data(*p.x), *dy = data(*p.dy), *dw = data(*p.dw);
  void* workspace = pack.has(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)
                        ? pack.value<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)
                        : nullptr;
  if (by.workspace > 0 && !workspace) status = CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  if (status != CUDNN_STATUS_SUCCESS) return status;
  if (by.engine == convolutions().plan_fails_to_run) return CUDNN_STATUS_EXECUTION_FAILED;
  note_convolution(kPlan + int(by.engine), CUDNN_DEFAULT_MATH);
  enqueue(handle->stream, [=] {
    if (by.workspace > 0) std::memset(workspace, 0xff, by.workspace);  // NaNs
    const auto sums = weight_gradient(dense<cudnnTensorStruct>(*p.x), dense<cudnnTensorStruct>(*p.dy),
                                      dense<cudnnFilterStruct>(*p.dw), convolution_of(*p.conv), x, dy);
    std::memcpy(dw, sums.data(), sums.size() * sizeof(float));
    pass(by.time);
  });
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace
}  // namespace topknot::emulator

using namespace topknot::emulator;

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  if (const int error = injected("cudnnBackendCreateDescriptor")) return static_cast<cudnnStatus_t>(error);
  if (!descriptor) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  *descriptor = new Shared(std::make_shared<Descriptor>(Descriptor{type, false, {}, {}, nullptr}));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Shared*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* elements) {
  if (const int error = injected("cudnnBackendSetAttribute")) return static_cast<cudnnStatus_t>(error);
  Descriptor& d = **static_cast<Shared*>(descriptor);
  const auto rule = rules(d.type).find(name);
  if (d.finalized || rule == rules(d.type).end() || !elements) return CUDNN_STATUS_BAD_PARAM;
  if (type != rule->second.type) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
  if (count < rule->second.least || count > rule->second.most) return CUDNN_STATUS_BAD_PARAM;
  Attribute attribute;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (std::int64_t i = 0; i < count; ++i)
      attribute.descriptors.push_back(*static_cast<Shared* const*>(elements)[i]);
    if (name == CUDNN_ATTR_OPERATIONGRAPH_OPS)
      for (const Shared& op : attribute.descriptors)
        if (!op->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  } else {
    const auto* bytes = static_cast<const std::byte*>(elements);
    attribute.bytes.assign(bytes, bytes + std::size_t(count) * rule->second.size);
    if (type == CUDNN_TYPE_HANDLE && !*static_cast<const cudnnHandle_t*>(elements))
      return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  }
  d.attributes[name] = std::move(attribute);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (const int error = injected("cudnnBackendFinalize")) return static_cast<cudnnStatus_t>(error);
  Descriptor& d = **static_cast<Shared*>(descriptor);
  const cudnnStatus_t status = finalize(d);
  if (status == CUDNN_STATUS_SUCCESS) d.finalized = true;
  return status;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       std::int64_t most, std::int64_t* count, void* elements) {
  if (const int error = injected("cudnnBackendGetAttribute")) return static_cast<cudnnStatus_t>(error);
  const Descriptor& d = **static_cast<Shared*>(descriptor);
  return d.finalized ? get(d, name, type, most, count, elements) : CUDNN_STATUS_NOT_INITIALIZED;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
  if (const int error = injected("cudnnBackendExecute")) return static_cast<cudnnStatus_t>(error);
  if (!handle || !plan || !pack) return CUDNN_STATUS_BAD_PARAM;
  const Descriptor &by = **static_cast<Shared*>(plan), &with = **static_cast<Shared*>(pack);
  if (!by.finalized || !with.finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  return execute(handle, by, with);
}

}  // extern "C"
