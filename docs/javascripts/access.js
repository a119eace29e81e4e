// What the theme leaves out for keyboards and screen readers: tables scroll by key, empty corners are no headers, and the
// buttons of code blocks are no landmarks.
function complete() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
  for (const corner of document.querySelectorAll("th:empty")) corner.setAttribute("role", "presentation");
  for (const bar of document.querySelectorAll("nav.md-code__nav")) bar.setAttribute("role", "presentation");
}
complete();
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
