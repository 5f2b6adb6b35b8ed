#include "nn/core/autograd.h"

#include <unordered_map>
#include <utility>

#include "nn/base/check.h"
#include "nn/core/parameter.h"

namespace topknot {

struct Node {
  const char* op = "constant";
  Tensor value;
  Tensor grad;
  bool requires_grad = false;
  Parameter* parameter = nullptr;
  bool gradient_written = false;  // parameters: since the last mark_gradients_unwritten()
  std::vector<Variable> inputs;
  BackwardFn backward;
};

Variable::Variable(Tensor value) : node_(std::make_shared<Node>()) {
  node_->value = std::move(value);
}

Variable::Variable(Parameter& parameter, Tensor value) : Variable(std::move(value)) {
  node_->op = "parameter";
  node_->parameter = &parameter;
  node_->requires_grad = true;
}

Variable::Variable(const char* op, Tensor value, std::vector<Variable> inputs, BackwardFn backward)
    : Variable(std::move(value)) {
  node_->op = op;
  for (const Variable& input : inputs) node_->requires_grad |= input.requires_grad();
  if (!node_->requires_grad) return;
  node_->inputs = std::move(inputs);
  node_->backward = std::move(backward);
}

const Tensor& Variable::value() const {
  return node_->value;
}
Tensor& Variable::value() {
  return node_->value;
}
bool Variable::requires_grad() const {
  return node_ && node_->requires_grad;
}

bool Variable::exclusive() const {
  return node_.use_count() == 1 && node_->value.exclusive();
}

void write_gradient(const GradientTarget& target, const Tensor& gradient) {
  if (!target.data) return;
  const auto n = static_cast<std::size_t>(gradient.numel());
  const DeviceBackend& device = backend(gradient.device());
  if (target.accumulate)
    device.add(DType::f32, target.data, gradient.data(), target.data, n);
  else
    device.copy(gradient.data(), target.data, n);
}

GradientTarget Variable::gradient_target() const {
  if (!node_->requires_grad) return {};
  TOPKNOT_CHECK(node_->parameter, "gradient_target is for parameters and constants");
  const bool accumulate = node_->gradient_written;
  node_->gradient_written = true;
  return {node_->parameter->gradient(), accumulate};
}

InputGradient Variable::input_gradient() const {
  if (!node_->requires_grad) return {};
  if (!node_->parameter && node_->grad.exclusive()) return {std::exchange(node_->grad, Tensor()), true};
  return {Tensor::empty_like(node_->value), false};
}

void Variable::accumulate_grad(Tensor grad) const {
  if (!node_->requires_grad) return;
  TOPKNOT_CHECK(grad.shape() == node_->value.shape() && grad.layout() == node_->value.layout() &&
                    grad.dtype() == node_->value.dtype(),
                std::string(node_->op) + ": gradient of shape " + grad.shape().str() +
                    " for a value of shape " + node_->value.shape().str());
  if (node_->parameter) return write_gradient(gradient_target(), grad);
  if (!node_->grad.defined()) {
    node_->grad = std::move(grad);
    return;
  }
  // The first contribution may be shared with another input of the op: the sum then needs its own memory.
  Tensor sum = node_->grad.exclusive() ? node_->grad : Tensor::empty_like(grad);
  backend(grad.device())
      .add(grad.dtype(), node_->grad.data(), grad.data(), sum.data(), static_cast<std::size_t>(grad.numel()));
  node_->grad = std::move(sum);
}

// Post-order of the graph under `root`: inputs before users. Iterative, since networks are deep.
class Tape {
 public:
  using NodePtr = std::shared_ptr<Node>;  // the walk keeps every node alive until its turn
  static std::vector<NodePtr> record(const NodePtr& root, std::unordered_map<Node*, int>& uses) {
    std::vector<NodePtr> order;
    std::vector<std::pair<NodePtr, std::size_t>> stack{{root, 0}};
    uses[root.get()] = 0;
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      if (next == node->inputs.size()) {
        order.push_back(std::move(node));
        stack.pop_back();
        continue;
      }
      const NodePtr input = node->inputs[next++].node_;
      if (!input->requires_grad) continue;
      if (uses[input.get()]++ == 0) stack.emplace_back(input, 0);
    }
    return order;
  }

  static void run(const Variable& loss, const GradientHook& on_grad_ready) {
    std::unordered_map<Node*, int> uses;  // how many recorded ops still owe this node a contribution
    std::vector<NodePtr> order = record(loss.node_, uses);
    while (!order.empty()) {
      const NodePtr node = std::move(order.back());
      order.pop_back();
      if (node->parameter) continue;
      BackwardFn fn = std::move(node->backward);
      const std::vector<Variable> inputs = std::move(node->inputs);
      node->backward = nullptr;
      node->inputs.clear();
      if (fn && node->grad.defined()) fn(std::move(node->grad));
      node->grad = Tensor();
      fn = nullptr;  // frees what the op kept for its backward
      for (const Variable& input : inputs) {
        Node* source = input.node_.get();
        if (source->requires_grad && --uses[source] == 0 && source->parameter && on_grad_ready)
          on_grad_ready(*source->parameter);
      }
    }
  }
  static void mark_unwritten(const Variable& leaf) { leaf.node_->gradient_written = false; }
  static bool written(const Variable& leaf) { return leaf.node_->gradient_written; }
};

void backward(const Variable& loss, const GradientHook& on_grad_ready, float scale) {
  TOPKNOT_CHECK(loss.value().numel() == 1, "backward starts from a loss of one element");
  if (!loss.requires_grad()) return;
  Tensor seed = Tensor::empty_like(loss.value());
  backend(seed.device()).fill(seed.data(), 1, scale);
  loss.accumulate_grad(std::move(seed));
  Tape::run(loss, on_grad_ready);
}

void ParameterArena::mark_gradients_unwritten() {
  for (Parameter* parameter : order_) Tape::mark_unwritten(parameter->variable_);
}

std::vector<Parameter*> ParameterArena::zero_unwritten_gradients() {
  std::vector<Parameter*> unwritten;
  for (Parameter* parameter : order_)
    if (!Tape::written(parameter->variable_)) {
      backend(device_).fill_zero(parameter->gradient(), parameter->numel());
      unwritten.push_back(parameter);
    }
  return unwritten;
}

}  // namespace topknot
