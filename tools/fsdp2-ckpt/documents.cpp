// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "documents.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <vector>

#include "fsdp2/version.hpp"

namespace fsdp2::tool {

namespace {

/// Text for roff: hyphens that can be copied, and no line that looks like a request.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if ((c == '.' || c == '\'') && (result.empty() || result.back() == '\n')) result += "\\&";
    if (c == '-')
      result += "\\-";
    else if (c == '\\')
      result += "\\e";
    else
      result += c;
  }
  return result;
}

/// "-q", "--quiet".
std::vector<std::string> names_of(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

bool is_flag(const CLI::Option& option) {
  return option.get_expected_max() == 0;
}

std::vector<const CLI::Option*> options_of(const CLI::App& app, bool positional) {
  return app.get_options(
      [&](const CLI::Option* option) { return option->nonpositional() != positional && !option->get_group().empty(); });
}

/// "SRC DST [OPTIONS]".
std::string synopsis(const CLI::App& command) {
  std::string text;
  for (const CLI::Option* option : options_of(command, true)) text += option->get_name(true) + " ";
  return text + "[OPTIONS]";
}

/// The value that an option takes, by the first word of what is said of its type or description.
std::string value_of(const CLI::Option& option) {
  if (is_flag(option)) return "";
  const std::string type = option.get_type_name();
  return " " + type.substr(0, type.find_first_of(": "));
}

void add_options(std::string& page, const CLI::App& command) {
  for (const bool positional : {true, false})
    for (const CLI::Option* option : options_of(command, positional)) {
      const std::string name = positional ? option->get_name(true)
                                          : fmt::format("{}{}", fmt::join(names_of(*option), ", "), value_of(*option));
      const std::string description = option->get_description();
      const std::string initial = option->get_default_str();
      page += fmt::format(".TP\n.B {}\n{}{}\n", roff(name), roff(description),
                          initial.empty() ? "" : fmt::format(" (by default {})", roff(initial)));
    }
}

}  // namespace

std::string man_page(const CLI::App& app) {
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  std::string page = fmt::format(
      ".\\\" SPDX-FileCopyrightText: 2026 The fsdp2 authors\n.\\\" SPDX-License-Identifier: BSD-3-Clause\n"
      ".\\\" Written by {0} --man.\n.TH FSDP2\\-CKPT 1 \"\" \"fsdp2 {1}\" \"User Commands\"\n.SH NAME\n"
      "{0} \\- checkpoints of fsdp2 on the command line\n.SH SYNOPSIS\n",
      roff(app.get_name()), roff(version()));
  for (const CLI::App* command : commands)
    page +=
        fmt::format(".B {} {}\n{}\n.br\n", roff(app.get_name()), roff(command->get_name()), roff(synopsis(*command)));
  page += fmt::format(".SH DESCRIPTION\n{}\n.SH COMMANDS\n", roff(app.get_description()));
  for (const CLI::App* command : commands) {
    page += fmt::format(".SS {} {}\n{}\n", roff(command->get_name()), roff(synopsis(*command)),
                        roff(command->get_description()));
    add_options(page, *command);
  }
  page += ".SH OPTIONS\n";
  add_options(page, app);
  constexpr std::string_view statuses = "Exit status: ";  // what the footer begins with
  page += fmt::format(".SH EXIT STATUS\n{}\n", roff(std::string_view(app.get_footer()).substr(statuses.size())));
  return page;
}

std::string bash_completion(const CLI::App& app) {
  const auto options = [](const CLI::App& command) {
    std::string words;
    for (const CLI::Option* option : options_of(command, false))
      for (const std::string& name : names_of(*option)) words += (words.empty() ? "" : " ") + name;
    return words;
  };
  std::string cases;
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command->get_name(), options(*command));
    names += command->get_name() + " ";
  }
  return fmt::format(
      "# SPDX-FileCopyrightText: 2026 The fsdp2 authors\n# SPDX-License-Identifier: BSD-3-Clause\n"
      "# Written by {0} --bash-completion.\n"
      "_fsdp2_ckpt() {{\n"
      "  local word=${{COMP_WORDS[COMP_CWORD]}} words=\"\"\n"
      "  case ${{COMP_WORDS[1]}} in\n{1}  esac\n"
      "  ((COMP_CWORD > 1)) || words=\"{2}{3}\"\n"
      "  if [[ $word == -* ]] || ((COMP_CWORD == 1)); then\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n"
      "  else\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
      "  fi\n"
      "}}\n"
      "complete -o filenames -F _fsdp2_ckpt {0}\n",
      app.get_name(), cases, names, options(app));
}

}  // namespace fsdp2::tool
