// Tables sort by the column whose heading is pressed; cells without a number or text stay last.
for (const table of document.querySelectorAll("table.numbers")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => {
        const text = row.cells[column].textContent.trim();
        return { row, text, number: parseFloat(text.replace(/,/g, "")), empty: text === "-" || text === "" };
      });
      keyed.sort((a, b) => {
        if (a.empty || b.empty) return a.empty - b.empty;
        const order = a.number - b.number || a.text.localeCompare(b.text, undefined, { numeric: true });
        return up ? order : -order;
      });
      body.append(...keyed.map((line) => line.row));
    });
  });
}
