// Scores examples with an exported program, in a process without Python.
//
//     serve PROGRAM COLUMNS < ids
//
// PROGRAM is a TorchScript file (.pt) or an AOTInductor package (any other name) whose one input are ids, int64
// [B, COLUMNS], and whose one output are numbers, float32, of B examples. Each line has the ids of an example, between
// spaces. All lines are one batch. It prints the numbers of an example a line, so that they read back as they were.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

int64_t read_columns(const std::string& text) {
  size_t read = 0;
  int64_t columns = 0;
  try {
    columns = std::stoll(text, &read);
  } catch (const std::exception&) {
    read = 0;
  }
  if (read == 0 || read != text.size() || columns < 1) {
    throw std::runtime_error("COLUMNS must be an integer, 1 or more, got " + text);
  }
  return columns;
}

// The ids of all lines, one after the other. An id is any int64; what is none is an error, never another id.
std::vector<int64_t> read_ids(std::istream& in, int64_t columns) {
  std::vector<int64_t> ids;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    std::istringstream words(line);
    std::string word;
    int64_t count = 0;
    for (; words >> word; ++count) {
      size_t read = 0;
      try {
        ids.push_back(std::stoll(word, &read));
      } catch (const std::exception&) {
        read = 0;
      }
      if (read != word.size()) {
        throw std::runtime_error("line " + std::to_string(number) + ": an id must be an int64, got " + word);
      }
    }
    if (count != columns) {
      throw std::runtime_error("line " + std::to_string(number) + " must have " + std::to_string(columns) +
                               " ids, it has " + std::to_string(count));
    }
  }
  return ids;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Says which rows the program has, on stderr.
at::Tensor score(const std::string& path, const at::Tensor& ids) {
  if (ends_with(path, ".pt")) {
    torch::jit::ExtraFilesMap extra{{"oneemb.json", ""}};
    torch::jit::Module program = torch::jit::load(path, c10::kCPU, extra);
    std::cerr << extra["oneemb.json"] << "\n";
    return program.forward({ids}).toTensor();
  }
  // Else a package takes a tensor of another dtype, shape or stride for one that it was compiled for.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  torch::inductor::AOTIModelPackageLoader program(path);
  std::cerr << program.get_metadata()["oneemb.json"] << "\n";
  return program.run({ids}).at(0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: serve PROGRAM COLUMNS < ids\n";
    return 2;
  }
  try {
    c10::InferenceMode inference;
    const int64_t columns = read_columns(arguments[2]);
    std::vector<int64_t> ids = read_ids(std::cin, columns);
    const int64_t examples = static_cast<int64_t>(ids.size()) / columns;
    at::Tensor batch = torch::from_blob(ids.data(), {examples, columns}, torch::kInt64);
    at::Tensor scores = score(arguments[1], batch).to(torch::kFloat32);
    scores = scores.reshape({examples, examples > 0 ? -1 : 0}).contiguous();
    const float* value = scores.data_ptr<float>();
    for (int64_t b = 0; b < examples; ++b) {
      for (int64_t d = 0; d < scores.size(1); ++d) std::printf(d ? " %.9g" : "%.9g", *value++);
      std::printf("\n");
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
