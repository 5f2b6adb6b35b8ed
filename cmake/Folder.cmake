# topknot_folder(NAME LIBS...): every source of a folder (and its sub-folders) as one OBJECT library. An archive would
# drop the files that only register themselves. A source's suffix names its backend: *_cpu.cpp, *_cuda.cpp and *.cu
# need that backend, *_stub.cpp stands in where CUDA is absent.
function(topknot_folder name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_main\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_cuda\\.cpp$")
  if(NOT sources)
    file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp "")
    set(sources ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
  endif()
  add_library(${name} OBJECT ${sources})
  target_link_libraries(${name} PUBLIC topknot_options OpenMP::OpenMP_CXX Threads::Threads ${ARGN})
endfunction()

# topknot_executable(NAME SOURCES FOLDERS...): a program made of whole folders.
function(topknot_executable name sources)
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARGN})
endfunction()
