// A GPU has no access to what does not lie at a multiple of its size. Kernels are compiled with
// -fsanitize=alignment, which calls this; names and layouts are the compiler's (GCC's and clang's libubsan).
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

struct Mismatch {
  const char* file;
  std::uint32_t line, column;
  const struct {
    std::uint16_t kind, info;
    char name[1];
  } * type;
  unsigned char log2_of_alignment, access;
};

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(const Mismatch* what, std::uintptr_t at) {
  std::fprintf(stderr, "emulated GPU: misaligned address: %s at %#lx, which is no multiple of %d (%s:%u)\n",
               what->type->name, static_cast<unsigned long>(at), 1 << what->log2_of_alignment, what->file,
               what->line);
  std::abort();
}
