# topknot_folder(NAME LIBS...): every source of a folder (and its sub-folders) as one OBJECT library. An archive would
# drop the files that only register themselves. A source's suffix names its backend: *_cuda.cpp and *.cu are the CUDA
# backend, *_stub.cpp stands in where there is none; they become the libraries NAME_cuda and NAME_stub.
function(topknot_folder name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cu)
  list(FILTER sources EXCLUDE REGEX "_main\\.cpp$")
  set(stubs ${sources})
  list(FILTER stubs INCLUDE REGEX "_stub\\.cpp$")
  set(cuda ${sources})
  list(FILTER cuda INCLUDE REGEX "_cuda\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_(cuda|stub)\\.cpp$")
  set(libraries topknot_options OpenMP::OpenMP_CXX Threads::Threads ${ARGN})
  add_library(${name} OBJECT ${sources})
  target_link_libraries(${name} PUBLIC ${libraries})
  if(stubs)
    add_library(${name}_stub OBJECT ${stubs})
    target_link_libraries(${name}_stub PUBLIC ${libraries})
  endif()
  set_property(GLOBAL PROPERTY topknot_${name}_cuda_sources ${cuda} ${kernels})
  set_property(GLOBAL PROPERTY topknot_${name}_libraries ${libraries})
  if(TOPKNOT_HAS_CUDA AND (cuda OR kernels))
    add_library(${name}_cuda OBJECT ${cuda} ${kernels})
    target_include_directories(${name}_cuda PRIVATE ${CMAKE_SOURCE_DIR}/nn/core/nvcc)
    target_link_libraries(${name}_cuda PUBLIC ${libraries} topknot_cuda_headers topknot_cuda_libraries)
  endif()
endfunction()

# topknot_program(NAME BACKEND SOURCES FOLDERS...): made of whole folders and their backend: cuda, stub, or stand_in, the
# CUDA backend on a CPU (tests/cuda).
function(topknot_program name backend sources)
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARGN})
  foreach(folder ${ARGN})
    if(TARGET ${folder}_${backend})
      target_link_libraries(${name} PRIVATE ${folder}_${backend})
    endif()
  endforeach()
endfunction()

# A program without a GPU.
function(topknot_executable name sources)
  topknot_program(${name} stub "${sources}" ${ARGN})
endfunction()

# A program as users get it: with the CUDA backend where it is built.
function(topknot_user_program name sources)
  if(TOPKNOT_HAS_CUDA)
    topknot_program(${name} cuda "${sources}" ${ARGN})
  else()
    topknot_program(${name} stub "${sources}" ${ARGN})
  endif()
endfunction()
