# cmake -D FROM=SOURCES -D VERSION=0.2.0 -D TO=FILE.cpp -P Revision.cmake: writes what nn/base/program.h leaves to the build. The
# revision is a commit's (0123abc), with what has been changed since (0123abc-dirty-89cdef0, of the difference; new files do not
# count), or "unknown" without git. Run by every build, since a commit changes no source.
execute_process(COMMAND git describe --always --dirty WORKING_DIRECTORY ${FROM}
                OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT revision)
  set(revision unknown)
elseif(revision MATCHES "-dirty$")
  execute_process(COMMAND git diff HEAD COMMAND git hash-object --stdin WORKING_DIRECTORY ${FROM}
                  OUTPUT_VARIABLE difference OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  string(SUBSTRING "${difference}" 0 7 difference)
  string(APPEND revision "-${difference}")
endif()
file(CONFIGURE OUTPUT ${TO} CONTENT [[
#include "nn/base/program.h"

namespace topknot {
const char* program_number() { return "${VERSION}"; }
const char* program_revision() { return "${revision}"; }
}  // namespace topknot
]])
