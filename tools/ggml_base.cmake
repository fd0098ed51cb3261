# Read by CMake right after `project(ggml)` (CMAKE_PROJECT_ggml_INCLUDE): how the library ggml-base is compiled.
#
# With BLAS every chunk of a prompt dequantizes all weights with ggml-base's `to_float`, which upstream compiles for the oldest x86-64
# and which GCC unrolls before it could vectorize: one weight at a time. The bits do not change: no multiply and add are contracted.
function(shardwise_fast_dequantize)
  set(options -ffp-contract=off)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND options -march=native)
  endif()
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    list(APPEND options "SHELL:--param max-completely-peel-times=4")
  endif()
  foreach(option IN LISTS options)
    target_compile_options(ggml-base PRIVATE "$<$<COMPILE_LANGUAGE:C>:${option}>")
  endforeach()
endfunction()

if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang" AND NOT WIN32)
  cmake_language(DEFER CALL shardwise_fast_dequantize)
endif()
